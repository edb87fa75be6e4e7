package cluster

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/cprun/cprun/internal/launch"
)

const (
	// A node whose ranks failed first maxFirstCauses times in a row, or that was lost maxLosses times, is left out.
	maxFirstCauses = 3
	maxLosses      = 2
)

// A tally is the job's history of its starts. Each decision carries it, so that the next leader has it.
type tally struct {
	Retries launch.Retries `json:"retries"`
	Cause   string         `json:"cause,omitempty"` // key of the node that failed first last time
	InRow   int            `json:"in_row,omitempty"`
	Lost    map[string]int `json:"lost,omitempty"` // losses of each node, by key
	Target  int            `json:"target"`         // agents of the first start
}

// key identifies an agent's place in the tally. A restarted agent has the same key.
func key(m *Member) string { return fmt.Sprintf("%s#%d", m.HostID, m.NodeRank) }

// record counts the end of a start. cause is the key of the node with the first failed rank, or ""; lost are the keys
// of lost nodes.
func (t *tally) record(cause string, lost []string) {
	if cause != t.Cause {
		t.Cause, t.InRow = cause, 0
	}
	if cause != "" {
		t.InRow++
	}
	counts := map[string]int{}
	maps.Copy(counts, t.Lost)
	for _, k := range lost {
		counts[k]++
	}
	t.Lost = counts
}

// excludedFor returns the reason to leave a node out, or "".
func (t *tally) excludedFor(key string) string {
	switch {
	case t.InRow >= maxFirstCauses && t.Cause == key:
		return fmt.Sprintf("its ranks were the first to fail %d times in a row", t.InRow)
	case t.Lost[key] >= maxLosses:
		return fmt.Sprintf("it was lost %d times", t.Lost[key])
	}
	return ""
}

// A candidate is an agent that may join the next start. Its NodeRank is the requested one, or -1.
type candidate struct {
	Member
	joined int // order of joining
}

// chooseMembers picks at most most agents for the next start: first members of the last one. Nodes that the tally
// excludes come last, and only to reach least. left holds a note for each one left out.
func chooseMembers(joined []candidate, last *Assignment, t *tally, least, most int) (agents []Member, left []string) {
	ranked := assignNodeRanks(joined, last)
	var in, out []candidate
	for _, c := range ranked {
		if t.excludedFor(key(&c.Member)) == "" {
			in = append(in, c)
		} else {
			out = append(out, c)
		}
	}
	for len(in) < least && len(out) > 0 {
		in, out = append(in, out[0]), out[1:]
	}
	for _, c := range out {
		left = append(left, fmt.Sprintf("node %s (node rank %d) is left out: %s", c.Host, c.NodeRank,
			t.excludedFor(key(&c.Member))))
	}
	for _, c := range in[:min(len(in), most)] {
		agents = append(agents, c.Member)
	}
	return agents, left
}

// assignNodeRanks assigns node ranks and sorts: members of the last start first, then agents that request a rank, then
// the others by joining order. A requested rank goes to its requester; members of the last start keep theirs; the rest
// get the lowest free ranks.
func assignNodeRanks(joined []candidate, last *Assignment) []candidate {
	before := map[string]int{} // node ranks of the last start
	for _, m := range last.Members {
		before[m.Name] = m.NodeRank
	}
	class := func(c *candidate) int {
		_, was := before[c.Name]
		switch {
		case was:
			return 0
		case c.NodeRank >= 0:
			return 1
		}
		return 2
	}
	all := slices.Clone(joined)
	slices.SortFunc(all, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(class(&a), class(&b)), cmp.Compare(a.joined, b.joined), cmp.Compare(a.Name, b.Name))
	})
	taken := map[int]bool{}
	for _, c := range all {
		taken[c.NodeRank] = true
	}
	for i := range all {
		c := &all[i]
		if rank, was := before[c.Name]; was && !taken[rank] {
			c.NodeRank = rank
			taken[rank] = true
		}
	}
	free := 0
	for i := range all {
		if all[i].NodeRank < 0 {
			for taken[free] {
				free++
			}
			all[i].NodeRank = free
			taken[free] = true
		}
	}
	return all
}
