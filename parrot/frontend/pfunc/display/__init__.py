"""How a program is shown: tables, values and bars, in notebooks and on terminals."""
