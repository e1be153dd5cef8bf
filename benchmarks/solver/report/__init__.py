"""What a run of the benchmark found, as tables on screen and in Markdown, and as plots."""
