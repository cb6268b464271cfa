"""Model files: the store on disk, and the formats that weights come in."""
