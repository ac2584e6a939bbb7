"""The longest wait of a test for another thread or process: a bound for a busy machine."""

WAIT_LIMIT_S = 240  # below pytest's own limit of a test
