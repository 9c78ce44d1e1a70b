"""Speed on a CPU that others use, too."""
