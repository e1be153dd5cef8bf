"""What a replay costs: its time, beside a plain loop's, and its memory."""
