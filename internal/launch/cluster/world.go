package cluster

import (
	"cmp"
	"slices"
)

// World is the agents of one start of the workers.
type World struct {
	Generation int      `json:"generation"` // counts worlds, from 1; no two of a job have the same
	Restart    int      `json:"restart"`    // of the workers, from 0
	Agents     []Member `json:"agents"`     // by rank of their first worker
	Size       int      `json:"size"`       // workers of all agents
}

// Member is an agent's place in a world.
type Member struct {
	Name      string `json:"name"` // unique: the host, and a digest of the agent's key
	Host      string `json:"host"`
	HostID    string `json:"host_id"` // agents with the same one share a host
	NodeRank  int    `json:"node_rank"`
	FirstRank int    `json:"first_rank"` // of its workers
	NProc     int    `json:"nproc"`
	Addr      string `json:"addr"` // host:port of its control connections
}

// index returns the place of the agent of that name in Agents, or -1.
func (w *World) index(name string) int {
	return slices.IndexFunc(w.Agents, func(m Member) bool { return m.Name == name })
}

// place puts agents in order and gives their workers ranks: agents of one host are neighbours, and hosts
// come in the order of their lowest node rank.
func place(agents []Member) (placed []Member, size int) {
	lowest := map[string]int{}
	for _, m := range agents {
		if l, ok := lowest[m.HostID]; !ok || m.NodeRank < l {
			lowest[m.HostID] = m.NodeRank
		}
	}
	placed = slices.Clone(agents)
	slices.SortFunc(placed, func(a, b Member) int {
		return cmp.Or(cmp.Compare(lowest[a.HostID], lowest[b.HostID]), cmp.Compare(a.HostID, b.HostID),
			cmp.Compare(a.NodeRank, b.NodeRank))
	})
	for i := range placed {
		placed[i].FirstRank = size
		size += placed[i].NProc
	}
	return placed, size
}
