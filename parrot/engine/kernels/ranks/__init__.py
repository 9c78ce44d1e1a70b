"""What the ranks of a divided model do through memory that all of them can reach."""
