"""Engine processes: starting, finding, supervising them."""
