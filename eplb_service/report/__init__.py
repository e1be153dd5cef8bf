"""Reports on a replay: a self-contained HTML file, and its charts as SVG files."""
