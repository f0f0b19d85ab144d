"""From a checkpoint to an engine directory: flags, conversion, export, verification."""
