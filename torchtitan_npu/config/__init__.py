"""Configuration of a job: its sections, the parser, and the checks that run before anything starts."""
