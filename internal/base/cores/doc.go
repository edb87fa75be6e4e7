// Package cores binds a process to one core, or to those next to its GPU.
//
// A host with two sockets has two NUMA nodes. A rank that runs on the other node reaches its GPU, and the host memory
// that it copies, through the link between the sockets. KeepNear uses only cores that the process may use already: a
// mask of the user, of a batch system or of a container (cpuset) stays in force.
//
//	bound, err := cores.KeepNear("0000:1b:00.0")
package cores
