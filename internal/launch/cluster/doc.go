// Package cluster makes one job of the agents of several nodes. An agent is the cprun process that starts a node's
// workers. The agents agree which nodes run, with which ranks, on each start of the workers, and how the job ends.
// Membership is the type to know; it implements launch.Membership:
//
//	m, err := cluster.Join(ctx, cluster.Config{Job: "7", Key: key, Min: 2, Max: 2, …})
//	result := launch.Run(ctx, launch.Job{Membership: m, …})
//	err = m.Close(result.ExitCode, "")
//
// docs/cluster-protocol.md specifies states, messages, decisions, times and threats.
package cluster

// The type coordinator has the states of an agent, leadership its work as leader. They have no goroutines, connections,
// disk or clock, so tests run thousands of jobs with faults in simulated time. Membership connects them to the network
// and the launcher.
//
// Goroutines of a Membership, in addition to those of the packages wire and gossip:
//
//	loop     owns the coordinator; ended by Close
//	read     one per connection, passes its messages to loop; ends with the connection
//	dial     one per dialed address; ends with the handshake
//	prepare  calls RunDir.Prepare or RunDir.Claim; ends with it
