package launch

import (
	"encoding/json"
	"slices"
)

// What the other nodes of a job say of a start, and what they are told of its addresses.

// onNews does what the agent of another node asks for.
func (t *attempt) onNews(n News) {
	switch {
	case n.Addrs != nil:
		t.introduce(n.Addrs)
	case n.Failed != nil || n.Lost != "":
		failed := -1
		if n.Failed != nil {
			failed = *n.Failed
		}
		t.fail(failed, n.Lost)
	case n.Ask:
		t.table(false)
	case n.Standings != nil:
		t.passedOn(n.Standings)
	case n.Kill:
		t.forced = true
		t.killAll()
	case n.Stop != "":
		t.stop(n.Stop)
	}
}

// listening notes where a worker can be reached. When all have said so, the other nodes are told.
func (t *attempt) listening(c *child, e Event) {
	if json.Unmarshal(e.Data, &c.addr) != nil || t.Listen == "" {
		return
	}
	addrs := make([]string, 0, t.job.NProc)
	for _, c := range t.children {
		if c.addr != "" {
			addrs = append(addrs, c.addr)
		}
	}
	if len(addrs) == t.job.NProc {
		t.cohort.Say(News{Addrs: addrs})
	}
}

// introduce tells the workers where all ranks are. Those of this node meet in its private directory.
func (t *attempt) introduce(addrs []string) {
	if t.introduced || len(addrs) != t.Place.WorldSize {
		return
	}
	t.introduced = true
	addrs = slices.Clone(addrs)
	for r := range t.job.NProc {
		addrs[t.Place.FirstRank+r] = ""
	}
	t.tell(command{Kind: commandPeers, Addrs: addrs})
}
