"""Faults by a script, on the real actors, and what must hold all the while (design §7)."""
