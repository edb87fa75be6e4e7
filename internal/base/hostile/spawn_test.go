package hostile

import (
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// spawnMode is the first argument of this test's binary when it is to start another program.
const spawnMode = "spawn"

// usage is what a process took, with those that it has started and waited for.
type usage struct {
	Resident int64 // bytes at most, of the largest of them
	Time     time.Duration
	Status   int
}

// spawn runs a program, and writes its id, what it took and its status to descriptor 3. A process that
// a large one starts counts as large itself, since it was that one for a moment; this one is small.
func spawn(args []string) int {
	report := os.NewFile(3, "report")
	c := exec.Command(args[0], args[1:]...)
	c.Stdout, c.Stderr = os.Stdout, os.Stderr
	if err := c.Start(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Fprintf(report, "%d\n", c.Process.Pid)
	_ = c.Wait() // its status is reported
	use := c.ProcessState.SysUsage().(*syscall.Rusage)
	fmt.Fprintf(
		report,
		"%d %d %d\n",
		use.Maxrss<<10,
		c.ProcessState.UserTime()+c.ProcessState.SystemTime(),
		c.ProcessState.ExitCode(),
	)
	return 0
}
