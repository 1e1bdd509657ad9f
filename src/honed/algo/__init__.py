"""Pure functions from groups to samples; numpy only."""
