// Package cluster makes one job of the agents of several nodes: it agrees with them on which nodes run,
// with which ranks, on each start of the workers, and on how the job ends. Cohort is what internal/launch
// asks. docs/cluster-protocol.md describes messages, who decides, timeouts and threats.
//
// What is decided stands in machine, which has no goroutines, no connections and no clock, so that
// tests run thousands of jobs with faults in simulated time. Cohort feeds it.
//
// Goroutines of a Cohort, and who ends them:
//
//	loop     owns the machine; ended by Close
//	read     one a connection, hands its messages to loop; ends with the connection
//	dial     one an address that is tried; ends with the handshake
//	prepare  calls Config.Prepare; ends with it
//
// and those of the packages wire and gossip.
package cluster
