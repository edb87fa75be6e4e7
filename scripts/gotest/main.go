// Command gotest runs go test and prints the same as go test. It writes the ten slowest tests to a file:
//
//	go run ./scripts/gotest FILE -short ./...
package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"slices"
	"strings"

	"github.com/cprun/cprun/internal/base/files"
)

func main() {
	c := exec.Command("go", append([]string{"test", "-json"}, os.Args[2:]...)...)
	c.Stderr = os.Stderr
	out, err := c.StdoutPipe()
	if err == nil {
		err = c.Start()
	}
	if err == nil {
		err = errors.Join(record(out, os.Args[1]), c.Wait())
	}
	if err == nil {
		return
	}
	if !errors.As(err, new(*exec.ExitError)) { // which go test explains
		fmt.Fprintln(os.Stderr, "gotest:", err)
	}
	os.Exit(1)
}

// An event is a line of go test -json.
type event struct {
	Action, Package, Test, Output string
	Elapsed                       float64
}

// A timed is a test with its seconds.
type timed struct {
	seconds float64
	name    string
}

// record prints events like go test without -json: the last line of a package that passes, and all lines of others,
// except the output of passing tests. It writes the ten slowest tests to a file.
func record(events io.Reader, file string) error {
	held, passed, parts := map[string][]event{}, map[string]bool{}, map[string]float64{}
	var all []timed
	d := json.NewDecoder(events)
	for {
		var e event
		if err := d.Decode(&e); err == io.EOF {
			break
		} else if err != nil {
			return err
		}
		name := e.Package + "." + e.Test
		switch ended := e.Action == "pass" || e.Action == "fail" || e.Action == "skip"; {
		case e.Action == "build-output":
			fmt.Print(e.Output)
		case e.Action == "output":
			held[e.Package] = append(held[e.Package], e)
		case ended && e.Test != "":
			passed[name] = e.Action != "fail"
			// The own time of a test lacks its parallel parts.
			seconds := max(e.Elapsed, parts[name])
			if i := strings.LastIndex(e.Test, "/"); i >= 0 {
				parts[e.Package+"."+e.Test[:i]] += seconds
			} else {
				all = append(all, timed{seconds, path.Base(name)})
			}
		case ended:
			lines := held[e.Package]
			if e.Action != "fail" {
				lines = lines[max(0, len(lines)-1):]
			}
			for _, l := range lines {
				if !passed[l.Package+"."+l.Test] && !strings.HasPrefix(l.Output, "=== ") {
					fmt.Print(l.Output)
				}
			}
			delete(held, e.Package)
		}
	}
	slices.SortFunc(all, func(a, b timed) int { return cmp.Compare(b.seconds, a.seconds) })
	return files.WriteTo(file, func(w io.Writer) (err error) {
		for _, t := range all[:min(10, len(all))] {
			_, e := fmt.Fprintf(w, "%7.1f  %s\n", t.seconds, t.name)
			err = errors.Join(err, e)
		}
		return err
	})
}
