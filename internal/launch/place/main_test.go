package place

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
)

// as runs the test binary as a program for scripts/test-slurm.
var as = flag.String(
	"as",
	"",
	"hosts: expand each line of the input; task: print the place of this process; \"\": run the tests",
)

func TestMain(m *testing.M) {
	flag.Parse()
	switch *as {
	case "hosts":
		expandLines()
	case "task":
		os.Exit(printPlace())
	default:
		os.Exit(m.Run())
	}
}

// expandLines prints the hosts of each line, and "error" for an invalid list.
func expandLines() {
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		line := "error"
		if hosts, err := Hosts(in.Text()); err == nil {
			line = strings.Join(hosts, " ")
		}
		fmt.Println(line)
	}
}

// printPlace prints this process's placement as JSON, or the error.
func printPlace() int {
	host, _ := os.Hostname()
	p, err := Find(os.Getenv, Flags{NodeRank: -1, Hostname: host})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	line, err := json.Marshal(p)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Println(string(line))
	return 0
}
