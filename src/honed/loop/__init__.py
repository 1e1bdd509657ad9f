"""The road: capture, curate, rollout, learn, gate, deploy. Knows only protocols."""
