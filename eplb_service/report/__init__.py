"""Reports on a replay: an HTML file without external resources, and the same charts as SVG files."""
