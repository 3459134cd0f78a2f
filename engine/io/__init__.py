"""The world outside the engine: sound files, video files and devices, read on the engine's own rates and clock."""
