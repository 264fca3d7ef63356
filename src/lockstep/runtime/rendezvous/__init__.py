"""The store through which ranks find each other, and the proof that a peer belongs to the job."""
