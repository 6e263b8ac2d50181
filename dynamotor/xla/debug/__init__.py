"""Looking inside: counters and times, profiles, and why graphs were compiled or cut."""
