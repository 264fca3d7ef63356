"""Where the ranks of a job meet, and how they prove that they belong to it."""
