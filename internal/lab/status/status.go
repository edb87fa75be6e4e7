// Package status stores the live state of a run in its run directory, for readers on any host: one small file for each
// node, rewritten about every second. It contains no secret. A reader must not trust a file: it may be torn, old, or
// forged.
//
//	err := status.Write(logs, &status.Node{RunID: id, State: status.Running, Rows: rows, …}) // the launcher
//	nodes, err := status.Read(logs)                                                       // cprun top
package status

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/launch/waits"
)

// Version is the version of the file's format.
const Version = 1

// States of a launcher. A killed launcher stays Running; see Node.Written.
const (
	Running = "running"
	Ended   = "ended"
)

// Bounds of a file.
const (
	maxFile  = 4 << 20 // bytes: 4,096 ranks that each wait for some others
	maxNodes = 4096
	maxRows  = 4096
	maxWhy   = 400 // bytes
)

// Node is one node's state, written by its launcher.
type Node struct {
	Version   int       `json:"version"`
	RunID     string    `json:"run_id"` // equal on all nodes of a run; a later run of the user has another
	Host      string    `json:"host"`
	PID       int       `json:"pid"` // of the launcher
	Rank      int       `json:"node_rank"`
	FirstRank int       `json:"first_rank"`
	Ranks     int       `json:"ranks"`      // of this node
	WorldSize int       `json:"world_size"` // of all nodes
	Start     int       `json:"start"`      // starts of all workers before the current one
	Begun     time.Time `json:"begun"`      // start of the launcher
	Written   time.Time `json:"written"`
	Every     float64   `json:"every_seconds"` // interval between two writes
	State     string    `json:"state"`
	ExitCode  int       `json:"exit_code"`     // if Ended
	Why       string    `json:"why,omitempty"` // reason of the failure
	// Rows are its workers, by rank; none between two starts.
	Rows []Row `json:"rows,omitempty"`
}

// Row is one rank's work and waits.
type Row struct {
	waits.WaitState
	// Resident is the host memory of its process, in bytes; 0: not known.
	Resident int64 `json:"resident_bytes,omitempty"`
}

// name returns the name of a node's file in the directory of the logs, which is private to the user.
func name(rank int) string { return fmt.Sprintf("status-%04d.json", rank) }

// Write replaces a node's file atomically, without waiting for the disk. One goroutine of one process writes a node's
// file: the temporary file has a fixed name, which a killed process may have left.
func Write(logs *os.Root, n *Node) error {
	text, err := json.Marshal(n)
	if err != nil {
		return fmt.Errorf("status: %w", err)
	}
	temp := name(n.Rank) + ".new"
	_ = logs.Remove(temp) // usually there is none; CreateAs reports other errors
	d, err := files.CreateAs(logs, temp, name(n.Rank))
	if err != nil {
		return err
	}
	_, err = d.Write(append(text, '\n'))
	if err = errors.Join(err, d.Close()); err == nil {
		err = d.Rename()
	}
	if err != nil {
		return errors.Join(err, d.Discard())
	}
	return nil
}

// Read returns the nodes of the run with the newest file, by rank; none without files. It skips an unreadable file if
// there are others.
func Read(logs *os.Root) ([]Node, error) {
	names, err := fs.Glob(logs.FS(), "status-*.json")
	if err != nil {
		return nil, err
	}
	var nodes []Node
	var faults []error
	for _, name := range names[:min(len(names), maxNodes)] {
		text, err := files.ReadIn(logs, name, maxFile)
		if err == nil {
			var n Node
			if n, err = Decode(text); err == nil {
				nodes = append(nodes, n)
				continue
			}
		}
		if !errors.Is(err, fs.ErrNotExist) {
			faults = append(faults, err)
		}
	}
	if len(nodes) == 0 {
		return nil, errors.Join(faults...)
	}
	return latest(nodes), nil
}

// latest keeps the nodes of the run with the newest file. A node outside the newest start stays, without ranks.
func latest(nodes []Node) []Node {
	last := slices.MaxFunc(nodes, func(a, b Node) int { return a.Written.Compare(b.Written) })
	nodes = slices.DeleteFunc(nodes, func(n Node) bool { return n.RunID != last.RunID })
	start := slices.MaxFunc(nodes, func(a, b Node) int { return a.Start - b.Start }).Start
	for i := range nodes {
		if n := &nodes[i]; n.Start < start {
			n.Rows, n.Ranks = nil, 0
		}
	}
	slices.SortStableFunc(nodes, func(a, b Node) int { return a.Rank - b.Rank })
	return nodes
}

// Decode decodes one file, bounds it and removes control characters.
func Decode(text []byte) (n Node, err error) {
	if err := json.Unmarshal(text, &n); err != nil {
		return Node{}, fmt.Errorf("status: %w", err)
	}
	if n.Version != Version {
		return Node{}, fmt.Errorf("status: version %d; this cprun reads version %d", n.Version, Version)
	}
	n.RunID, n.Host, n.State = waits.Word(n.RunID), waits.Word(n.Host), waits.Word(n.State)
	n.Why = terminal.Clip(strings.TrimSpace(terminal.Line(n.Why)), maxWhy)
	for _, v := range []*int{&n.PID, &n.Rank, &n.FirstRank, &n.Ranks, &n.WorldSize, &n.Start} {
		*v = max(*v, 0)
	}
	if !(n.Every > 0 && n.Every < 3600) {
		n.Every = 1
	}
	n.Rows = n.Rows[:min(len(n.Rows), maxRows)]
	for i := range n.Rows {
		r := &n.Rows[i]
		r.Clean()
		r.Resident = max(r.Resident, 0)
	}
	return n, nil
}
