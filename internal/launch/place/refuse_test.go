package place

import (
	"os"
	"slices"
	"strings"
	"testing"
)

// refused contains environments and flags that contradict each other or are incomplete. The message names the fault,
// its value and the fix.
var refused = []struct {
	name, env string
	flags     func(f *Flags)
	want      []string
}{
	{
		name: "a task without its step",
		env:  "SLURM_JOB_ID=7 SLURM_PROCID=3 SLURM_NTASKS=4",
		want: []string{"SLURM_PROCID=3", "SLURM_NTASKS=4", "SLURM_STEP_ID", "srun", "env -u SLURM_PROCID"},
	},
	{
		name: "the first task without its step",
		env:  "SLURM_JOB_ID=7 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=4",
		want: []string{"SLURM_STEP_NUM_TASKS=4", "SLURM_STEP_ID= is not"},
	},
	{
		name: "a task without its job",
		env:  "SLURM_PROCID=0 SLURM_NTASKS=2",
		want: []string{"SLURM_JOB_ID", "--export=ALL"},
	},
	{name: "a job that is no number", env: "SLURM_JOB_ID=x\x1b[2J", want: []string{`SLURM_JOB_ID="x\x1b[2J"`}},
	{
		name: "no number of tasks",
		env:  strings.ReplaceAll(taskANode, "SLURM_STEP_NUM_TASKS=2", ""),
		want: []string{"SLURM_STEP_NUM_TASKS is not set"},
	},
	{
		name: "no name of the node",
		env:  strings.ReplaceAll(taskANode, "SLURMD_NODENAME=node02", ""),
		want: []string{"SLURMD_NODENAME=, ", "node02", "SLURM_NODEID=1"},
	},
	{
		name: "another step's nodes",
		env:  taskANode + "SLURM_STEP_NODELIST=node[01-03]",
		want: []string{"SLURM_STEP_NODELIST=node[01-03] names 3 nodes", "SLURM_STEP_NUM_NODES=2"},
	},
	{
		name: "nodes that are no list",
		env:  taskANode + "SLURM_STEP_NODELIST=node[01-",
		want: []string{"SLURM_STEP_NODELIST", "node[01-", "bracket"},
	},
	{
		name: "another node",
		env:  taskANode + "SLURMD_NODENAME=node03",
		want: []string{"SLURMD_NODENAME=node03", "node02 at SLURM_NODEID=1"},
	},
	{
		name: "counts of another step",
		env:  taskANode + "SLURM_STEP_TASKS_PER_NODE=2(x2)",
		want: []string{"SLURM_STEP_TASKS_PER_NODE=2(x2)", "4 tasks on 2 nodes", "SLURM_STEP_NUM_TASKS=2"},
	},
	{
		name: "counts of fewer nodes",
		env:  taskANode + "SLURM_STEP_TASKS_PER_NODE=2",
		want: []string{"2 tasks on 1 nodes", "SLURM_STEP_NUM_NODES=2"},
	},
	{
		name: "counts that are none",
		env:  taskANode + "SLURM_STEP_TASKS_PER_NODE=2(x",
		want: []string{"SLURM_STEP_TASKS_PER_NODE", "2(x3),1"},
	},
	{
		name: "a node without a task",
		env:  taskAGPU + "SLURM_STEP_TASKS_PER_NODE=3,4,0(x2)",
		want: []string{"a node has no task", "--ntasks-per-node"},
	},
	{
		name: "too high a local rank",
		env:  taskANode + "SLURM_LOCALID=1",
		want: []string{"SLURM_LOCALID=1", "only 1 tasks"},
	},
	{name: "too high a rank", env: taskANode + "SLURM_PROCID=2", want: []string{"SLURM_PROCID=2", "from 0 to 1"}},
	{
		name: "several components",
		env:  taskANode + "SLURM_HET_SIZE=2",
		want: []string{"SLURM_HET_SIZE=2", "one component"},
	},
	{
		name: "RANK exported before srun",
		env:  taskANode + "RANK=0 LOCAL_RANK=0 WORLD_SIZE=2",
		want: []string{"RANK=0", "SLURM_PROCID=1", "env -u RANK"},
	},
	{
		name: "MASTER_PORT that is none",
		env:  taskANode + "MASTER_ADDR=node01 MASTER_PORT=http",
		want: []string{"MASTER_PORT=http", "from 1 to 65535"},
	},
	{
		name:  "--nnodes of another size",
		env:   taskANode,
		flags: func(f *Flags) { f.Nodes = "3" },
		want:  []string{"--nnodes 3, where there are 2 nodes,", "SLURM_STEP_NUM_TASKS=2", "Leave the flag out"},
	},
	{
		name:  "--nnodes of fewer nodes",
		env:   taskAGPU,
		flags: func(f *Flags) { f.Nodes = "1:3" },
		want:  []string{"--nnodes 1:3, where there are 4 nodes,"},
	},
	{
		name:  "--nnodes MIN with uneven tasks",
		env:   taskAGPU,
		flags: func(f *Flags) { f.Nodes = "2:4" },
		want:  []string{"--nnodes 2:4", "tasks on every node"},
	},
	{
		name:  "--node-rank of another node",
		env:   taskANode,
		flags: func(f *Flags) { f.NodeRank = 0 },
		want:  []string{"--node-rank 0", "rank, 1"},
	},
	{
		name:  "--nproc beside tasks",
		env:   taskAGPU,
		flags: func(f *Flags) { f.NProc = 8 },
		want:  []string{"--nproc 8", "2 on this node", "one task per node"},
	},

	{
		name: "torchrun without a local size",
		env:  "RANK=1 LOCAL_RANK=0 WORLD_SIZE=2 MASTER_ADDR=h",
		want: []string{"LOCAL_WORLD_SIZE is not set"},
	},
	{
		name: "a rank beyond the world",
		env:  "RANK=2 LOCAL_RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=1",
		want: []string{"RANK=2", "from 0 to 1"},
	},
	{
		name: "torchrun's ranks that are none",
		env:  "RANK=x LOCAL_RANK=0 WORLD_SIZE=8",
		want: []string{"RANK=x", "from 0 to 7"},
	},
	{
		name: "MPI that meets nowhere",
		env:  openMPI,
		want: []string{
			"task 2 of 4",
			"OMPI_COMM_WORLD_RANK=2",
			"--rendezvous HOST:PORT",
			"env -u OMPI_COMM_WORLD_RANK",
		},
	},
	{
		name: "a named job of MPI that meets nowhere",
		env:  openMPI + "PMIX_NAMESPACE=j",
		want: []string{"--rendezvous HOST:PORT"},
	},
	{
		name:  "MPI on one host and the rank of another node",
		env:   mvapich + "MASTER_ADDR=h MV2_COMM_WORLD_LOCAL_RANK=0",
		flags: func(f *Flags) { f.NodeRank = 1 },
		want:  []string{"--node-rank 1", "rank, 0"},
	},
	{
		name: "torchrun with a store that is nowhere",
		env:  "RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=1 TORCHELASTIC_USE_AGENT_STORE=True",
		want: []string{"--rendezvous HOST:PORT"},
	},
	{
		name: "MPI on one host that meets nowhere",
		env:  mvapich,
		want: []string{"--rendezvous 127.0.0.1:29400", "MVAPICH"},
	},
	{
		name: "several hosts that meet at themselves",
		env:  pmi + "MASTER_ADDR=localhost",
		want: []string{"MASTER_ADDR=localhost", "PMI_SIZE=2", "host of rank 0"},
	},
	{name: "PMIx alone", env: "PMIX_RANK=0", want: []string{"PMIX_RANK=0", "env -u PMIX_RANK"}},
	{
		name:  "MPI and another number of nodes",
		env:   openMPI + "MASTER_ADDR=h",
		flags: func(f *Flags) { f.Nodes = "4" },
		want:  []string{"--nnodes 4", "2 nodes"},
	},
	{
		name:  "MPI and the rank of another node",
		env:   openMPI + "MASTER_ADDR=h",
		flags: func(f *Flags) { f.NodeRank = 0 },
		want:  []string{"--node-rank 0", "rank, 1"},
	},
	{
		name:  "torchrun and the rank of another node",
		env:   strings.Replace(torchWorker, "GROUP_RANK=1", "GROUP_RANK=3", 1),
		flags: func(f *Flags) { f.NodeRank = 1 },
		want:  []string{"--node-rank 1", "rank, 3"},
	},
	{
		name:  "MPI with uneven nodes",
		env:   openMPI + "MASTER_ADDR=h OMPI_COMM_WORLD_LOCAL_SIZE=3",
		flags: func(f *Flags) { f.Nodes = "2" },
		want:  []string{"--nnodes 2", "tasks on every node"},
	},
	{
		name: "a port that is none",
		env:  openMPI + "MASTER_ADDR=h MASTER_PORT=0",
		want: []string{"MASTER_PORT=0", "from 1 to 65535"},
	},
	{
		name: "a long name of a job",
		env:  openMPI + "MASTER_ADDR=h PMIX_NAMESPACE=" + strings.Repeat("j", maxText),
		want: []string{"PMIX_NAMESPACE=jjj", "is not a valid name"},
	},
	{
		name: "a name of a job that commands a terminal",
		env:  openMPI + "MASTER_ADDR=h PMIX_NAMESPACE=\x1b[2J",
		want: []string{`PMIX_NAMESPACE="\x1b[2J"`},
	},

	{
		name: "nodes without an address",
		env:  "NNODES=2 NODE_RANK=0",
		want: []string{"NNODES=2", "--rendezvous HOST:PORT", "MASTER_ADDR"},
	},
	{
		name: "nodes without a rank",
		env:  "NNODES=2 MASTER_ADDR=h",
		want: []string{"which node this is", "--node-rank", "NODE_RANK"},
	},
	{name: "a node of no number", env: "NODE_RANK=1 MASTER_ADDR=h", want: []string{"NODE_RANK=1", "--nnodes N"}},
	{
		name:  "a rendezvous of no number",
		flags: func(f *Flags) { f.Rendezvous = "job-0.job:29400" },
		want:  []string{"--rendezvous job-0.job:29400", "--nnodes N"},
	},
	{
		name: "a node beyond one", env: "PET_NNODES=1 PET_NODE_RANK=1 PET_MASTER_ADDR=h",
		want: []string{"PET_NODE_RANK=1", "one node"},
	},
	{
		name: "a rank beyond the nodes",
		env:  "NNODES=2 MASTER_ADDR=h NODE_RANK=2",
		want: []string{"NODE_RANK=2", "NNODES=2"},
	},
	{name: "no number of nodes", env: "PET_NNODES=two", want: []string{"PET_NNODES=two", "MIN:MAX"}},
	{name: "no address of a master", env: "NNODES=2 NODE_RANK=0 MASTER_ADDR=a,b", want: []string{"MASTER_ADDR=a,b"}},
	{name: "no rendezvous", env: "PET_NNODES=2 PET_RDZV_ENDPOINT=h:", want: []string{"PET_RDZV_ENDPOINT=h:"}},
	{
		name: "processes that do not divide",
		env:  pyTorchJob + "PET_NPROC_PER_NODE=2",
		want: []string{"WORLD_SIZE=3", "PET_NPROC_PER_NODE=2"},
	},
	{
		name: "a rank beyond the processes' nodes",
		env:  strings.Replace(pyTorchJob, "SIZE=3", "SIZE=4", 1) + "PET_NPROC_PER_NODE=2",
		want: []string{"RANK=2", "WORLD_SIZE=4, PET_NPROC_PER_NODE=2"},
	},
	{
		name: "no processes", env: pyTorchJob + "PET_NPROC_PER_NODE=0",
		want: []string{"PET_NPROC_PER_NODE=0", "from 1"},
	},
	{
		name: "too many nodes", env: strings.Replace(pyTorchJob, "SIZE=3", "SIZE=70000", 1),
		want: []string{"WORLD_SIZE=70000", "at most 65536 nodes"},
	},
	{
		name: "processes that are none",
		env:  trainer + "PET_NPROC_PER_NODE=many",
		want: []string{"PET_NPROC_PER_NODE=many"},
	},
	{name: "a rank of no world", env: "RANK=1", want: []string{"RANK=1", "WORLD_SIZE", "env -u RANK"}},
	{name: "a world without a rank", env: "WORLD_SIZE=2", want: []string{"WORLD_SIZE=2", "RANK", "env -u WORLD_SIZE"}},
	{
		name: "a task of MPI without their number",
		env:  "OMPI_COMM_WORLD_RANK=1",
		want: []string{"OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE"},
	},
	{name: "a world that is none", env: "RANK=0 WORLD_SIZE=x", want: []string{"WORLD_SIZE=x"}},

	{
		name:  "--nnodes that is none",
		flags: func(f *Flags) { f.Nodes = "4:2" },
		want:  []string{"--nnodes 4:2", "MIN:MAX"},
	},
	{name: "--nnodes alone", flags: func(f *Flags) { f.Nodes = "2" }, want: []string{"--nnodes 2", "--rendezvous"}},
	{
		name:  "--node-rank alone",
		flags: func(f *Flags) { f.NodeRank = 1 },
		want:  []string{"--node-rank 1", "--nnodes N"},
	},
	{
		name:  "--node-rank beyond",
		flags: func(f *Flags) { f.Nodes, f.NodeRank, f.Rendezvous = "2", 2, "h:1" },
		want:  []string{"--node-rank 2", "0 to 1"},
	},
	{name: "--node-rank below", flags: func(f *Flags) { f.NodeRank = -2 }, want: []string{"--node-rank -2"}},
	{
		name:  "--rendezvous without a port",
		flags: func(f *Flags) { f.Rendezvous = "head" },
		want:  []string{"--rendezvous head", "node01:29400"},
	},
	{
		name:  "--rendezvous with a high port",
		flags: func(f *Flags) { f.Rendezvous = "head:65536" },
		want:  []string{"--rendezvous head:65536", "65535"},
	},
}

func TestFindRefuses(t *testing.T) {
	for _, c := range refused {
		f := typed()
		if c.flags != nil {
			c.flags(&f)
		}
		env := environment(c.env)
		p, err := Find(func(name string) string { return env[name] }, f)
		if err == nil {
			t.Errorf("%s: %s", c.name, summary(p))
			continue
		}
		for _, part := range c.want {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%s: %v\nwant %q", c.name, err, part)
			}
		}
	}
}

func TestNameWithABlank(t *testing.T) {
	env := environment(openMPI + "MASTER_ADDR=h")
	env["PMIX_NAMESPACE"] = "a b"
	if p, err := Find(func(name string) string { return env[name] }, typed()); err == nil {
		t.Errorf("%s", summary(p))
	}
}

// TestVariablesAreListed checks that cprun doctor lists exactly the variables that Find reads.
func TestVariablesAreListed(t *testing.T) {
	listed := map[string]bool{}
	for _, v := range VariableList() {
		if listed[v.Name] || v.Meaning == "" {
			t.Errorf("%s is there twice, or has no meaning", v.Name)
		}
		listed[v.Name] = true
	}
	read := map[string]bool{}
	watch := func(text string, change func(f *Flags)) {
		f, env := typed(), environment(text)
		if change != nil {
			change(&f)
		}
		Find(func(name string) string {
			read[name] = true
			return env[name]
		}, f)
	}
	for _, c := range found {
		watch(c.env, c.flags)
	}
	for _, c := range refused {
		watch(c.env, c.flags)
	}
	for name := range read {
		if !listed[name] {
			t.Errorf("%s is read and not listed", name)
		}
	}
	for name := range listed {
		if !read[name] {
			t.Errorf("%s is listed, and no case reads it", name)
		}
	}
}

// TestVariablesAreDocumented checks that the table in docs/cluster.md has them as well.
func TestVariablesAreDocumented(t *testing.T) {
	page, err := os.ReadFile("../../../docs/cluster.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range VariableList() {
		if !strings.Contains(string(page), "`"+v.Name+"`") {
			t.Errorf("docs/cluster.md does not name %s", v.Name)
		}
	}
}

// FuzzFind checks that any environment gives a valid placement, or a short message without control characters.
func FuzzFind(f *testing.F) {
	for _, c := range found {
		f.Add(c.env, "", "", -1, 0)
	}
	for _, c := range refused {
		f.Add(c.env, "1:2", "head:1", 0, 2)
	}
	f.Fuzz(func(t *testing.T, text, nodes, meet string, rank, nproc int) {
		env := environment(text)
		p, err := Find(
			func(name string) string { return env[name] },
			Flags{NProc: nproc, Nodes: nodes, NodeRank: rank, Rendezvous: meet},
		)
		if err != nil {
			if len(err.Error()) > 8000 || strings.ContainsAny(err.Error(), "\x00\x1b\n") {
				t.Fatalf("%.200q", err)
			}
			return
		}
		checkPlace(t, p)
	})
}

func checkPlace(t *testing.T, p Placement) {
	t.Helper()
	switch {
	case p.MinAgents < 1 || p.MaxAgents < p.MinAgents || p.Rank < -1 || p.Rank >= p.MaxAgents:
		t.Fatalf("rank %d of %d:%d", p.Rank, p.MinAgents, p.MaxAgents)
	case p.LocalRank < 0 || p.LocalRank >= p.LocalAgents || p.Workers < 0:
		t.Fatalf("local %d of %d, %d workers", p.LocalRank, p.LocalAgents, p.Workers)
	case p.Several() != (p.Rendezvous != ""), p.Several() && p.Job == "", p.Hosts != nil && p.Source != Slurm:
		t.Fatalf("%s", summary(p))
	}
	if p.Several() {
		if got, err := address(p.Rendezvous, 0); err != nil || got != p.Rendezvous {
			t.Fatalf("%s: %v", got, err)
		}
	}
	if slices.ContainsFunc(
		append(p.Notes, p.Job, p.Node, p.Rendezvous),
		func(s string) bool { return strings.ContainsAny(s, "\x00\x1b\n") },
	) {
		t.Fatalf("%q", p.Notes)
	}
}
