// Package place finds where this process stands among the tasks that a launcher of several nodes has
// started: Slurm, torchrun, MPI, the operators of Kubernetes, or a person with flags.
//
// An agent is one process of cprun that a user or a launcher starts. With one task on a node it spawns
// a worker for each device; with one task for each device, each task is an agent with one worker. Find
// says which agent this is, how many there are, and at which address they meet. It reads nothing but
// its arguments, so every launcher is a table of variables in the tests.
package place
