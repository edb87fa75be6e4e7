// Package launch runs a job on one node: it starts one worker process per rank by executing the same binary again,
// sends each its rank, stores and relays output, forwards signals, finds the first failed rank and its cause, and
// leaves no process and no file behind. The launcher calls Run; a worker calls Attach:
//
//	result := launch.Run(ctx, launch.Job{NProc: 8, Argv: []string{"worker", "train"}, Logs: logs, Stderr: os.Stderr})
//	os.Exit(result.ExitCode)
package launch

// Each worker inherits one end of a Unix socket pair as file descriptor 3. The launcher sends one hello (ranks, secret,
// payload) and later commands: stop, or report status. The worker sends events. When that socket closes, the other
// process is dead. The launcher opens no network port, and the job's secret is in no argument list, environment or
// file. On Linux, the kernel kills workers with their launcher (parent death signal).
//
// Goroutines of the launcher, and their ends:
//
//	loop      the caller of Run; keeps its OS thread, to which the parent death signal is tied; ends when all workers of
//	          the last attempt are reaped
//	relay     one per worker, reads its output; ends at the end of the pipe
//	receive   one per worker, reads its events; ends at the end of the socket
//	send      one per worker, writes its commands; ends with the socket
//	awaitEnd  one per worker, waits for its process; tells loop after relay and receive have ended
//	console   prints, and calls Job.OnEvent, so that a slow terminal does not block loop; closed by Run
