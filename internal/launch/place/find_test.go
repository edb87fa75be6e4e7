package place

import (
	"fmt"
	"strings"
	"testing"
)

// environment parses "A=1 B=2".
func environment(text string) map[string]string {
	env := map[string]string{}
	for v := range strings.FieldsSeq(text) {
		name, value, _ := strings.Cut(v, "=")
		env[name] = value
	}
	return env
}

// typed returns flags with none given.
func typed() Flags { return Flags{NodeRank: -1, Hostname: "here"} }

// summary formats a placement in one line.
func summary(p Placement) string {
	s := fmt.Sprintf("%s %s rank %d of %d:%d", p.Source, p.Job, p.Rank, p.MinAgents, p.MaxAgents)
	s += fmt.Sprintf(" workers %d local %d of %d %s", p.Workers, p.LocalRank, p.LocalAgents, p.Node)
	if p.Hosts != nil {
		s += fmt.Sprint(" ", p.Hosts)
	}
	if p.Rendezvous != "" {
		s += " at " + p.Rendezvous
	}
	return s
}

// The relevant variables of Slurm 22.05.
const (
	batchShell = "SLURM_JOB_ID=7 SLURM_JOB_NUM_NODES=3 SLURM_NTASKS=6 SLURM_TASKS_PER_NODE=2(x3) SLURM_PROCID=0 " +
		"SLURM_LOCALID=0 SLURM_NODEID=0 SLURMD_NODENAME=node01 "
	ofJob = "SLURM_JOB_ID=7 SLURM_JOB_NUM_NODES=3 "
	// Task 1 of `srun -N2 -n2 --ntasks-per-node=1` in that job.
	taskANode = ofJob + "SLURM_STEP_ID=1 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=2 " +
		"SLURM_STEP_NODELIST=node[01-02] SLURM_STEP_TASKS_PER_NODE=1(x2)" +
		" SLURM_NTASKS=2 SLURM_PROCID=1 SLURM_LOCALID=0 SLURM_NODEID=1 SLURMD_NODENAME=node02 SLURM_NNODES=2 "
	// Task 3 of seven on four nodes.
	taskAGPU = ofJob + "SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=7 SLURM_STEP_NUM_NODES=4 " +
		"SLURM_STEP_NODELIST=node[01-04] SLURM_STEP_TASKS_PER_NODE=2(x3),1" +
		" SLURM_NTASKS=7 SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NODEID=1 SLURMD_NODENAME=node02 "
	// Task 1 of two on one node.
	oneNode = ofJob + "SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=1 SLURM_STEP_NODELIST=node01 " +
		"SLURM_STEP_TASKS_PER_NODE=2" +
		" SLURM_NTASKS=2 SLURM_PROCID=1 SLURM_LOCALID=1 SLURM_NODEID=0 SLURMD_NODENAME=node01 "

	torchWorker = "RANK=3 LOCAL_RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 GROUP_RANK=1 MASTER_ADDR=head MASTER_PORT=29500 "
	openMPI     = "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=0 " +
		"OMPI_COMM_WORLD_LOCAL_SIZE=2 "
	pmi     = "PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1 "
	mvapich = "MV2_COMM_WORLD_RANK=1 MV2_COMM_WORLD_SIZE=2 MV2_COMM_WORLD_LOCAL_RANK=1 MV2_COMM_WORLD_LOCAL_SIZE=2 "
	trainer = "PET_NNODES=3 PET_NPROC_PER_NODE=auto PET_NODE_RANK=2 PET_MASTER_ADDR=job-node-0-0.job " +
		"PET_MASTER_PORT=29400 JOB_COMPLETION_INDEX=2 "
	pyTorchJob = "MASTER_ADDR=job-master-0 MASTER_PORT=23456 WORLD_SIZE=3 RANK=2 KUBERNETES_SERVICE_HOST=10.0.0.1 "
)

// found contains environments and their placements.
var found = []struct {
	name, env string
	flags     func(f *Flags)
	want      string
	note      string // a part of a note; "": no note
}{
	{name: "nothing", want: "alone  rank 0 of 1:1 workers 0 local 0 of 1 here"},
	{
		name:  "one node by flag",
		flags: func(f *Flags) { f.Nodes, f.NodeRank = "1", 0 },
		want:  "alone  rank 0 of 1:1 workers 0 local 0 of 1 here",
	},

	{
		name: "shell of sbatch",
		env:  batchShell,
		want: "alone slurm:7:0 rank 0 of 1:1 workers 0 local 0 of 1 here",
		note: "start it with srun",
	},
	{
		name: "shell of salloc on a login node",
		env:  "SLURM_JOB_ID=7 SLURM_JOB_NUM_NODES=1 SLURM_NTASKS=4",
		want: "alone slurm:7:0 rank 0 of 1:1 workers 0 local 0 of 1 here",
		note: "SLURMD_NODENAME is not set",
	},
	{
		name: "interactive step",
		env:  batchShell + "SLURM_STEP_ID=4294967290",
		want: "alone slurm:7:0 rank 0 of 1:1 workers 0 local 0 of 1 here",
		note: "start it with srun",
	},
	{
		name: "one task", env: "SLURM_JOB_ID=7 SLURM_JOB_NUM_NODES=1 SLURM_STEP_ID=2 SLURM_STEP_NUM_TASKS=1 " +
			"SLURM_PROCID=0 SLURMD_NODENAME=node01",
		want: "alone slurm:7.2:0 rank 0 of 1:1 workers 0 local 0 of 1 node01",
	},
	{
		name: "a task on each node",
		env:  taskANode,
		want: "slurm slurm:7.1:0 rank 1 of 2:2 workers 0 local 0 of 1 node02 [node01 node02] at " +
			"node01:21016",
	},
	{
		name: "requeued", env: taskANode + "SLURM_RESTART_COUNT=2",
		want: "slurm slurm:7.1:2 rank 1 of 2:2 workers 0 local 0 of 1 node02 [node01 node02] " +
			"at node01:21016",
	},
	{
		name: "a task for each GPU",
		env:  taskAGPU,
		want: "slurm slurm:7.0:0 rank 3 of 7:7 workers 1 local 1 of 2 node02 [node01 node02 node03 node04] " +
			"at node01:20007",
	},
	{
		name: "a task of an array", env: taskANode + "SLURM_ARRAY_JOB_ID=5 SLURM_ARRAY_TASK_ID=2",
		want: "slurm slurm:7.1:0 rank 1 of 2:2 workers 0 local 0 of 1 node02 [node01 node02] at " +
			"node01:21016",
	},
	{
		name: "a GPU bound to each task",
		env:  taskAGPU + "CUDA_VISIBLE_DEVICES=0",
		note: "--gpu-bind=none",
		want: "slurm slurm:7.0:0 rank 3 of 7:7 workers 1 local 1 of 2 node02 [node01 node02 node03 node04] " +
			"at node01:20007",
	},
	{
		name: "cyclic distribution", env: strings.Replace(taskAGPU, "SLURM_PROCID=3", "SLURM_PROCID=5", 1),
		note: "--distribution=block",
		want: "slurm slurm:7.0:0 rank 3 of 7:7 workers 1 local 1 of 2 node02 [node01 node02 node03 node04] " +
			"at node01:20007",
	},
	{
		name: "tasks of one node",
		env:  oneNode,
		want: "slurm slurm:7.0:0 rank 1 of 2:2 workers 1 local 1 of 2 node01 [node01] at 127.0.0.1:20007",
	},
	{
		name: "tasks of one node that meet elsewhere", env: oneNode,
		flags: func(f *Flags) { f.Rendezvous = "node01:5" },
		want:  "slurm slurm:7.0:0 rank 1 of 2:2 workers 1 local 1 of 2 node01 [node01] at node01:5",
	},
	{
		name: "an address of the user's own", env: taskANode,
		flags: func(f *Flags) { f.Rendezvous = "localhost:99" },
		want: "slurm slurm:7.1:0 rank 1 of 2:2 workers 0 local 0 of 1 node02 [node01 node02] at " +
			"localhost:99",
	},
	{
		name: "all GPUs for each task", env: taskAGPU + "CUDA_VISIBLE_DEVICES=0,1",
		flags: func(f *Flags) { f.NProc, f.Nodes = 2, "4" },
		want: "slurm slurm:7.0:0 rank 3 of 7:7 workers 1 local 1 of 2 node02 [node01 node02 node03 node04] " +
			"at node01:20007",
	},
	{
		name: "one GPU on each node", env: taskANode + "CUDA_VISIBLE_DEVICES=0 SLURM_STEP_RESV_PORTS=70000",
		want: "slurm slurm:7.1:0 rank 1 of 2:2 workers 0 local 0 of 1 node02 [node01 node02] at " +
			"node01:21016",
	},
	{
		name: "a lost task that is the only one", env: "SLURM_PROCID=0 SLURM_NTASKS=1 PMIX_RANK=0 PMI_SIZE=1",
		want: "alone  rank 0 of 1:1 workers 0 local 0 of 1 here",
	},
	{
		name: "reserved ports",
		env:  taskANode + "SLURM_STEP_RESV_PORTS=[12005-12006,12010]",
		want: "slurm slurm:7.1:0 rank 1 of 2:2 workers 0 local 0 of 1 node02 [node01 node02] at " +
			"node01:12005",
	},
	{
		name: "MASTER_ADDR of a script",
		env:  taskANode + "MASTER_ADDR=node01-ib MASTER_PORT=1234 SLURM_HET_SIZE=1",
		want: "slurm slurm:7.1:0 rank 1 of 2:2 workers 0 local 0 of 1 node02 [node01 node02] at " +
			"node01-ib:1234",
	},
	{
		name: "MASTER_ADDR that leads nowhere",
		env:  taskANode + "MASTER_ADDR=localhost",
		note: "MASTER_ADDR=localhost",
		want: "slurm slurm:7.1:0 rank 1 of 2:2 workers 0 local 0 of 1 node02 [node01 node02] at " +
			"node01:21016",
	},
	{
		name: "flags beside Slurm", env: taskANode,
		flags: func(f *Flags) { f.Nodes, f.NodeRank, f.Rendezvous, f.NProc = "1:4", 1, "node01:99", 8 },
		want: "slurm slurm:7.1:0 rank 1 of 1:2 workers 0 local 0 of 1 node02 [node01 node02] at " +
			"node01:99",
	},
	{
		name: "torchrun's variables made from Slurm's",
		env:  taskANode + "RANK=1 LOCAL_RANK=0 WORLD_SIZE=2",
		want: "slurm slurm:7.1:0 rank 1 of 2:2 workers 0 local 0 of 1 node02 [node01 node02] at " +
			"node01:21016",
	},
	{
		name: "srun's PMI",
		env:  taskANode + "PMI_RANK=1 PMI_SIZE=2 PMIX_RANK=1",
		want: "slurm slurm:7.1:0 rank 1 of 2:2 workers 0 local 0 of 1 node02 [node01 node02] at " +
			"node01:21016",
	},
	{
		name: "a task that stands alone on request",
		env:  strings.ReplaceAll(taskANode, "SLURM_PROCID=1 ", ""),
		want: "alone slurm:7:0 rank 0 of 1:1 workers 0 local 0 of 1 here",
		note: "start it with srun",
	},

	{
		name: "torchrun",
		env:  torchWorker,
		want: "torchrun torchrun:head:29500 rank 3 of 4:4 workers 1 local 1 of 2 here at head:29500",
	},
	{
		name: "torchrun with a store", env: torchWorker + "TORCHELASTIC_RUN_ID=r7 " +
			"TORCHELASTIC_USE_AGENT_STORE=True",
		want: "torchrun torchrun:r7 rank 3 of 4:4 workers 1 local 1 of 2 here at head:25716",
	},
	{
		name: "torchrun under srun",
		env:  taskANode + torchWorker + "TORCHELASTIC_RUN_ID=r7",
		want: "torchrun torchrun:r7 rank 3 of 4:4 workers 1 local 1 of 2 node02 at head:29500",
	},
	{
		name: "torchrun that meets elsewhere", env: torchWorker + "TORCHELASTIC_USE_AGENT_STORE=True",
		flags: func(f *Flags) { f.Rendezvous = "other:5" },
		want:  "torchrun torchrun:other:5 rank 3 of 4:4 workers 1 local 1 of 2 here at other:5",
	},
	{
		name: "torchrun under srun, by its size", env: taskANode + torchWorker,
		want: "torchrun torchrun:head:29500 rank 3 of 4:4 workers 1 local 1 of 2 node02 at head:29500",
	},
	{
		name: "torchrun under srun, by its name",
		env: taskANode + "RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=1 MASTER_ADDR=h " +
			"TORCHELASTIC_RUN_ID=r7",
		want: "torchrun torchrun:r7 rank 0 of 2:2 workers 1 local 0 of 1 node02 at h:29500",
	},
	{
		name: "torchrun on one node",
		env:  "RANK=1 LOCAL_RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=1",
		want: "torchrun torchrun:localhost:1 rank 1 of 2:2 workers 1 local 1 of 2 here at localhost:1",
	},
	{
		name: "torchrun with one worker",
		env:  "RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 LOCAL_WORLD_SIZE=1",
		want: "alone  rank 0 of 1:1 workers 0 local 0 of 1 here",
	},

	{
		name: "halves of one process",
		env:  "RANK=0 OMPI_COMM_WORLD_SIZE=1",
		want: "alone  rank 0 of 1:1 workers 0 local 0 of 1 here",
	},
	{
		name: "a rank beside --nnodes 1",
		env:  "RANK=1", flags: func(f *Flags) { f.Nodes = "1" },
		want: "alone  rank 0 of 1:1 workers 0 local 0 of 1 here",
	},
	{
		name:  "Open MPI",
		env:   openMPI,
		flags: func(f *Flags) { f.Rendezvous = "head:1" },
		want:  "openmpi openmpi:head:1 rank 2 of 4:4 workers 1 local 0 of 2 here at head:1",
	},
	{
		name: "Open MPI on one host",
		env: "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 " +
			"OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=prte-1@1 PMIX_RANK=1",
		want: "openmpi openmpi:prte-1@1 rank 1 of 2:2 workers 1 local 1 of 2 here at 127.0.0.1:20121",
	},
	{
		name: "Open MPI in a job of Slurm",
		env:  batchShell + openMPI + "MASTER_ADDR=node01",
		want: "openmpi openmpi:node01:29500 rank 2 of 4:4 workers 1 local 0 of 2 here at node01:29500",
	},
	{
		name: "mpirun under srun",
		env: taskANode + "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0 " +
			"OMPI_COMM_WORLD_LOCAL_SIZE=1 MASTER_ADDR=h",
		want: "openmpi openmpi:h:29500 rank 0 of 2:2 workers 0 local 0 of 1 node02 at h:29500",
	},
	{
		name: "Open MPI on one host that meets elsewhere",
		env: "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 " +
			"OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=j MASTER_ADDR=h",
		want: "openmpi openmpi:j rank 1 of 2:2 workers 1 local 1 of 2 here at h:29500",
	},
	{
		name: "variables of torchrun beside Open MPI's", env: openMPI + "MASTER_ADDR=h GROUP_RANK=3 " +
			"TORCHELASTIC_USE_AGENT_STORE=True",
		flags: func(f *Flags) { f.NodeRank = 1 },
		want:  "openmpi openmpi:h:29500 rank 2 of 4:4 workers 1 local 0 of 2 here at h:29500",
	},
	{
		name:  "uneven nodes whose rank is not known",
		env:   openMPI + "MASTER_ADDR=h OMPI_COMM_WORLD_LOCAL_SIZE=3 OMPI_COMM_WORLD_LOCAL_RANK=2",
		flags: func(f *Flags) { f.NodeRank = 1 },
		want:  "openmpi openmpi:h:29500 rank 2 of 4:4 workers 1 local 2 of 3 here at h:29500",
	},
	{
		name:  "ranks that alternate, with a node's rank",
		env:   openMPI + "MASTER_ADDR=h OMPI_COMM_WORLD_LOCAL_RANK=1",
		flags: func(f *Flags) { f.NodeRank = 3 },
		want:  "openmpi openmpi:h:29500 rank 2 of 4:4 workers 1 local 1 of 2 here at h:29500",
	},
	{
		name: "ranks that alternate",
		env:  openMPI + "MASTER_ADDR=h OMPI_COMM_WORLD_LOCAL_RANK=1",
		want: "openmpi openmpi:h:29500 rank 2 of 4:4 workers 1 local 1 of 2 here at h:29500",
	},
	{
		name: "MPICH", env: pmi + "MASTER_ADDR=head",
		flags: func(f *Flags) { f.Nodes = "2" },
		want:  "pmi pmi:head:29500 rank 1 of 2:2 workers 0 local 0 of 1 here at head:29500",
	},
	{
		name: "MVAPICH",
		env:  mvapich + "MASTER_ADDR=127.0.0.1",
		want: "mvapich mvapich:127.0.0.1:29500 rank 1 of 2:2 workers 1 local 1 of 2 here at 127.0.0.1:29500",
	},

	{
		name: "Kubernetes' Trainer",
		env:  trainer,
		want: "kubernetes kubernetes:job-node-0-0.job:29400 rank 2 of 3:3 workers 0 local 0 of 1 here at " +
			"job-node-0-0.job:29400",
	},
	{
		name: "PyTorchJob",
		env:  pyTorchJob,
		want: "kubernetes kubernetes:job-master-0:23456 rank 2 of 3:3 workers 0 local 0 of 1 here at " +
			"job-master-0:23456",
	},
	{
		name: "PyTorchJob that counts processes",
		env:  strings.Replace(pyTorchJob, "SIZE=3", "SIZE=24", 1) + "PET_NPROC_PER_NODE=8",
		want: "kubernetes kubernetes:job-master-0:23456 rank 2 of 3:3 workers 8 local 0 of 1 here at " +
			"job-master-0:23456",
	},
	{
		name: "elastic PyTorchJob",
		env:  "PET_NNODES=2:4 PET_RDZV_ENDPOINT=job-worker-0 PET_NPROC_PER_NODE=4 KUBERNETES_SERVICE_HOST=10.0.0.1",
		want: "kubernetes kubernetes:job-worker-0:29400 rank -1 of 2:4 workers 4 local 0 of 1 here at " +
			"job-worker-0:29400",
	},
	{
		name: "indexed Job", env: "JOB_COMPLETION_INDEX=1",
		flags: func(f *Flags) { f.Nodes, f.Rendezvous = "2", "job-0.job:29400" },
		want:  "flags flags:job-0.job:29400 rank 1 of 2:2 workers 0 local 0 of 1 here at job-0.job:29400",
	},
	{
		name: "one pod on request", env: "JOB_COMPLETION_INDEX=1",
		flags: func(f *Flags) { f.Nodes = "1" },
		want:  "alone  rank 0 of 1:1 workers 0 local 0 of 1 here",
	},
	{
		name: "processes of one node", env: "PET_NNODES=1 PET_NODE_RANK=0 PET_NPROC_PER_NODE=2 PET_MASTER_ADDR=h",
		flags: func(f *Flags) { f.Rendezvous = "h:29400" },
		want:  "alone  rank 0 of 1:1 workers 2 local 0 of 1 here",
	},
	{
		name: "processes by flag", env: trainer + "PET_NPROC_PER_NODE=4",
		flags: func(f *Flags) { f.NProc = 2 },
		want: "kubernetes kubernetes:job-node-0-0.job:29400 rank 2 of 3:3 workers 0 local 0 of 1 here at " +
			"job-node-0-0.job:29400",
	},
	{
		name: "indexed Job of single runs",
		env:  "JOB_COMPLETION_INDEX=1",
		want: "alone  rank 0 of 1:1 workers 0 local 0 of 1 here",
		note: "pass --nnodes N",
	},

	{
		name: "variables of scripts",
		env:  "NNODES=2 NODE_RANK=1 MASTER_ADDR=fe80::1",
		want: "torchrun torchrun:[fe80::1]:29500 rank 1 of 2:2 workers 0 local 0 of 1 here at [fe80::1]:29500",
	},
	{
		name: "flags", flags: func(f *Flags) { f.Nodes, f.NodeRank, f.Rendezvous = "4", 3, "10.1.2.3:29400" },
		want: "flags flags:10.1.2.3:29400 rank 3 of 4:4 workers 0 local 0 of 1 here at 10.1.2.3:29400",
	},
	{
		name: "flags without a rank", flags: func(f *Flags) { f.Nodes, f.Rendezvous = "2:4", "head:29400" },
		want: "flags flags:head:29400 rank -1 of 2:4 workers 0 local 0 of 1 here at head:29400",
	},
	{
		name: "flags beat variables", env: "NNODES=9 NODE_RANK=8 MASTER_ADDR=other",
		flags: func(f *Flags) { f.Nodes, f.NodeRank, f.Rendezvous = "2", 1, "head:1" },
		want:  "flags flags:head:1 rank 1 of 2:2 workers 0 local 0 of 1 here at head:1",
	},
}

func TestFind(t *testing.T) {
	for _, c := range found {
		f := typed()
		if c.flags != nil {
			c.flags(&f)
		}
		env := environment(c.env)
		p, err := Find(func(name string) string { return env[name] }, f)
		notes := strings.Join(p.Notes, "\n")
		if err != nil || summary(p) != c.want || !strings.Contains(notes, c.note) || c.note == "" && notes != "" {
			t.Errorf("%s:\n got %s\nwant %s\nnotes %q, want %q, %v", c.name, summary(p), c.want, notes, c.note, err)
		}
	}
}

func TestAddress(t *testing.T) {
	for text, want := range map[string]string{
		"head:1": "head:1", "head:65535": "head:65535", "head": "head:7", "[fe80::1]:2": "[fe80::1]:2",
		"fe80::1": "[fe80::1]:7", "[fe80::]": "[fe80::]:7", "fe80::": "[fe80::]:7",
		"": "", "head:": "", ":1": "", "a:b:": "", "head:0": "", "head:-1": "", "head:65536": "", "head:x": "",
		"a b:1": "", "a\x7f:1": "", "a/b:1": "", "a'b:1": "", strings.Repeat("h", maxHostName+1) + ":1": "",
	} {
		if got, err := address(text, 7); got != want || (err == nil) != (want != "") {
			t.Errorf("%q: %q, %v; want %q", text, got, err, want)
		}
	}
	if got, err := address("head", 0); err == nil {
		t.Errorf("without a port: %q", got)
	}
	for addr, want := range map[string]bool{"localhost:1": true, "LocalHost:1": true, "127.0.0.2:1": true, "[::1]:1": true,
		"0.0.0.0:1": true, "[::]:1": true, "node01:1": false, "10.0.0.1:1": false} {
		if loopback(addr) != want {
			t.Errorf("%s is local: %t", addr, !want)
		}
	}
}

func TestNodeRange(t *testing.T) {
	for text, want := range map[string][2]int{"1": {1, 1}, "2:4": {2, 4}, "1:65536": {1, 65536},
		"": {}, "0": {}, "0:2": {}, "x:2": {}, "2:x": {}, "-1:2": {}, "4:2": {}, "65537": {}, "1:2:3": {}} {
		least, most, err := nodeRange(text)
		if got := [2]int{least, most}; got != want || (err == nil) != (want != [2]int{}) {
			t.Errorf("%q: %v, %v; want %v", text, got, err, want)
		}
	}
}

// TestPortsOfNeighboursDiffer checks that jobs of an array, and concurrent steps of one job, have different ports on
// shared nodes.
func TestPortsOfNeighboursDiffer(t *testing.T) {
	seen := map[int]string{}
	for job := uint64(4_000_000); job < 4_000_900; job++ {
		for step := uint64(0); step < 4; step++ {
			port, who := stepPort(job, step), fmt.Sprintf("%d.%d", job, step)
			if port < firstPort || port >= firstPort+ports {
				t.Fatalf("%s: port %d", who, port)
			}
			if other, taken := seen[port]; taken {
				t.Fatalf("%s and %s both have port %d", who, other, port)
			}
			seen[port] = who
		}
	}
}

// TestRequeue checks that the name for scontrol of an array task has the array's number and its own.
func TestRequeue(t *testing.T) {
	for text, want := range map[string]string{
		"": "", batchShell: "7", taskANode: "7",
		taskAGPU + "SLURM_ARRAY_JOB_ID=5 SLURM_ARRAY_TASK_ID=2": "5_2", taskANode + "SLURM_ARRAY_JOB_ID=5": "7",
	} {
		env := environment(text)
		if p, err := Find(func(name string) string { return env[name] }, typed()); err != nil || p.SlurmJob != want {
			t.Errorf("%s: %q, %v; want %q", text, p.SlurmJob, err, want)
		}
	}
}
