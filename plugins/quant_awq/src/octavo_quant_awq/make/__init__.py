"""Making AWQ checkpoints: 4-bit weights whose scales were searched for on text."""
