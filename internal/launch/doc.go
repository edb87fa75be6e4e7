// Package launch is the agent of one node: it starts one worker process per rank by
// executing the same binary again, gives each its place in the job, stores and relays what
// they print, passes signals on, finds out which rank failed first and why, and leaves no
// process and no file behind.
//
// The agent calls Run; a worker calls Attach. Between them is one inherited Unix socket pair
// for each worker (file descriptor 3): the agent writes one hello (place, secret, payload),
// and later commands: stop, or what do you wait for? The worker writes events. When that socket closes, the other side
// is gone. Nothing listens on a network address, and the secret of a job never stands in an argument list, an
// environment or a file.
//
// It needs Linux: the parent death signal, and waiting for a process without reaping it.
//
// Goroutines of the agent, by name, and who ends them:
//
//	loop      the caller of Run; ends when every worker of the last attempt has been reaped
//	spawner   holds the OS thread that forks, to which the parent death signal is tied; closed by Run
//	relay     one a worker, reads its output; ends at the end of the pipe
//	receive   one a worker, reads its events; ends at the end of the socket
//	send      one a worker, writes its commands; ends with the socket
//	reap      one a worker, waits for its process; reports to loop when relay and receive have ended
//	dispatch  calls Job.OnEvent, so that a slow terminal never holds up loop; closed by Run
package launch
