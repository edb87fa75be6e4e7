// Package gossip finds the agents of a job and hints which of them may be gone. A few seeds are
// enough to find all. It ends nothing and starts nothing: what it says may be late or wrong, and
// whoever acts on it asks the agent itself.
//
// It runs memberlist (SWIM) on one port, UDP and TCP, which other streams of the job may share.
// Packets and streams are sealed with a key of the job, and begin with a label of the job, so two
// jobs on one port never meet. What does not begin as the job's packets do is dropped before
// memberlist sees it. Strangers hold a bounded number of streams and bytes, each for a short time.
//
// Sealing does not stop who repeats packets. Repeated, an old packet can show an agent that left
// for some seconds, until it is found silent.
//
// Goroutines, and who ends them:
//
//	seek         asks seeds until they answer; mingle asks members when it is new; ended by Close
//	pass         two of the guard, packets and streams; ended by Close
//	screen       one a stream, reads how it begins; ends with that, or with a deadline
//	listen       of a Port, reads packets; ended by Shutdown, which Close of the members calls
//	accept       of a Port, takes streams; ended by Close of the port
//	sort         one a stream, reads its first byte; ends with that, or with a deadline
//	memberlist's ended by Close; what waits for an answer ends within its deadline
package gossip
