// Package key gives the agents of a job one secret that other users do not have.
//
// Shared returns the key in a file of the run directory, which all agents of a job share, and makes it for the first
// agent that comes. File reads a key that the user made, such as a mounted Secret of Kubernetes. Both trust only files
// that no other user can read. The key is in no argument, no variable of the environment and no log.
package key
