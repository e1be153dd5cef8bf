"""Pictures of a replay: one HTML file that works offline, and the same charts as SVG files."""
