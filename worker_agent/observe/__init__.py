"""Observe mode: records heat and step times of an engine without changing the engine.

Each engine has a module whose ``install`` adds hooks that only read. ``observer`` runs in each rank and sends reports
to the service or, without one, to ``local``, which writes log lines and a trace file.
"""
