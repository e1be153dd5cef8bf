"""Files: heat traces of many formats, the native trace that recordings append to, and placement files of engines."""
