// Package key gives the agents of a job one secret that nobody else has.
//
// It comes from a file that the user names, or from the first agent, which makes it and hands it to the
// others: on one host through a Unix socket, under Slurm over TCP. There munge vouches for both sides: each side's ephemeral X25519 key is bound
// to a credential that only processes of the same user can make and read, so neither another user nor
// somebody on the network gets the key, or has an agent take another one. The key is never in an argument,
// in the environment or in a log.
package key
