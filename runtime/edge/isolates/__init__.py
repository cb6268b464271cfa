"""Handler processes: a zygote forks them, `dispatch` sends them events."""
