"""File formats: heat traces in many formats, the native trace of recordings, and engines' placement files."""
