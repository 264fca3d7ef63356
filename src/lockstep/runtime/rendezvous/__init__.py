"""The store through which ranks find each other, and the handshake that shows that a peer belongs to the job."""
