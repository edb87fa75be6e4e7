package place

import "slices"

// Variable is one that Find reads.
type Variable struct {
	Name    string
	Meaning string // one line, for cprun doctor
}

// VariableList lists every variable that Find reads.
func VariableList() []Variable {
	list := []Variable{
		{envJobID, "Slurm's job"},
		{envJobNodes, "nodes of the job, for a notice where a run uses one of several"},
		{envStepID, "the step of srun that this task is of; there is none in a batch shell"},
		{envStepTasks, "tasks of the step: one on each node, or one for each device"},
		{envStepNodes, "nodes of the step"},
		{envStepHosts, "their names, in the order of ranks"},
		{envStepCounts, "tasks on each of them"},
		{envStepPorts, "ports reserved by srun --resv-ports; the tasks meet at the first"},
		{envProcID, "this task's rank in the step; without it the process is no task, and stands alone"},
		{envLocalID, "its rank on this node"},
		{envNodeID, "this node's rank in the step"},
		{envNodeName, "this node's name"},
		{envTasks, "tasks of the job, to know a task that has lost its other variables"},
		{envHetSize, "components of the job; steps of several tasks run in jobs of one"},
		{envRestarts, "how often the job was requeued"},
		{envArrayJob, "the array that the job is of"},
		{envArrayTask, "its number in the array, to requeue it"},
		{envGPUsPerTask, "for a notice where each task sees one GPU alone"},
		{envVisible, "for the same notice; also read by the CUDA driver"},
		{envMasterAddr, "host of rank 0, where nodes or tasks meet"},
		{envMasterPort, "port there; default 29500"},
		{envPetRendezvous, "host:port where nodes meet; default port 29400"},
		{envPetMasterAddr, "as MASTER_ADDR, for torchrun's nodes"},
		{envPetMasterPort, "as MASTER_PORT, for torchrun's nodes"},
		{envPetNodes, "nodes, N or MIN:MAX, as torchrun reads it"},
		{envPetNodeRank, "this node's rank, as torchrun reads it"},
		{envPetProcesses, "processes on each node, as torchrun reads it; --nproc beats it"},
		{envNodes, "nodes, N or MIN:MAX, with MASTER_ADDR and NODE_RANK; --nnodes beats it"},
		{envNodeRank, "this node's rank; --node-rank beats it"},
		{envJobCompletion, "this pod's rank in an indexed Job of Kubernetes, where NODE_RANK is not set"},
		{envKubernetes, "to tell the operators of Kubernetes from scripts"},
		{envPMIxRank, "to know a task of a launcher that does not say how many there are"},
		{envGroupRank, "this node's rank, for torchrun's workers"},
		{envElasticRun, "torchrun's id of the job"},
		{envElasticCount, "how often torchrun has started its workers again"},
		{envElasticStore, "True where torchrun itself listens at MASTER_PORT, so that other ports are used"},
	}
	for _, l := range launchers() {
		list = append(list,
			Variable{l.rank, "this task's rank among those that " + l.name + " has started"},
			Variable{l.size, "how many those are"},
			Variable{l.local, "this task's rank on this node"},
			Variable{l.localSize, "tasks on this node"})
		for _, name := range l.id {
			list = append(list, Variable{name, "names the job of " + l.name + ", to make a port from"})
		}
	}
	seen := map[string]bool{}
	return slices.DeleteFunc(list, func(v Variable) bool {
		twice := seen[v.Name]
		seen[v.Name] = true
		return twice
	})
}
