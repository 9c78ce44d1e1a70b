"""What people see of a program: tables, values and bars, in notebooks and on terminals."""
