"""The agents' streams: what ranks say, from their Hello to the end of their connection."""
