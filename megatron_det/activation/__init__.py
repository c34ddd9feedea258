"""From a flag on the command line to an activated run. Importing this changes nothing."""
