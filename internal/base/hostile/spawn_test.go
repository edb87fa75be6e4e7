package hostile

import (
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// spawnMode is the first argument of the test binary if it must start another program.
const spawnMode = "spawn"

// A usage holds the resource usage of a process and its descendants.
type usage struct {
	Resident int64 // peak bytes of the largest process
	Time     time.Duration
	Status   int
}

// spawn runs a program and writes its process ID, usage and status to descriptor 3. The peak memory of a child includes
// its parent's memory at the fork. This process is small, so that effect is small also.
func spawn(args []string) int {
	report := os.NewFile(3, "report")
	c := exec.Command(args[0], args[1:]...)
	c.Stdout, c.Stderr = os.Stdout, os.Stderr
	if err := c.Start(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Fprintf(report, "%d\n", c.Process.Pid)
	_ = c.Wait() // the status is reported
	use := c.ProcessState.SysUsage().(*syscall.Rusage)
	took := c.ProcessState.UserTime() + c.ProcessState.SystemTime()
	fmt.Fprintf(report, "%d %d %d\n", use.Maxrss<<10, took, c.ProcessState.ExitCode())
	return 0
}
