"""Which replica a rank sends its tokens of an expert to: tables that are solved with the placement."""
