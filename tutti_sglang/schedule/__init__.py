"""WHEN bytes move: what the scheduler runs, how long it takes, and whether loading pays."""
