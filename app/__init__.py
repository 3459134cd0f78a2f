"""The application: for now a command line around the engine."""
