"""How long a test waits for another thread or process before it fails: a bound for a crowded machine."""

WAIT_LIMIT_S = 240  # below pytest's own limit of a test
