LIMIT = 1 / 0
