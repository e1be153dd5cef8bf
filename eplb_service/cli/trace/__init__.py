"""``eplb trace``: looks at traces, records, converts, cuts and makes them."""
