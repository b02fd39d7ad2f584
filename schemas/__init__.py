"""What crosses a process boundary: envelopes, events, subjects, limits and errors. Imports nothing of ours."""
