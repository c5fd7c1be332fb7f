// A client in JavaScript, made of the contract alone: node foreign_client.cjs ADDRESS FOLDER-OF-PROTO JOB
//
// It registers a job, sees it in a view of the cluster, ends it, and prints what it heard as a line of JSON.
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [, , address, folder, job] = process.argv;
const files = ["cluster", "jobs"].map((name) => `ps_protocol/v1/${name}.proto`);
const options = { includeDirs: [folder], keepCase: true, longs: String, enums: String, defaults: true };
const contract = grpc.loadPackageDefinition(loader.loadSync(files, options)).ps_protocol.v1;
const credentials = grpc.credentials.createInsecure();
const jobs = new contract.JobService(address, credentials);
const cluster = new contract.ClusterService(address, credentials);
const within = () => ({ deadline: Date.now() + 20_000 });

const call = (client, method, request) =>
  new Promise((resolve, reject) => {
    client[method](request, new grpc.Metadata(), within(), (error, answer) => (error ? reject(error) : resolve(answer)));
  });

async function firstViewOfTheJob() {
  const stream = cluster.WatchStatus({}, new grpc.Metadata(), within());
  for await (const view of stream) {
    if (view.status.jobs.some((each) => each.name === job)) {
      stream.cancel();
      return view;
    }
  }
}

const spec = {
  name: job,
  parameters: [{ name: "weight", shape: [2, 3], data_type: "DATA_TYPE_FLOAT32" }],
  optimizers: ["SGD"],
  groups: [{ hyper_parameters: [{ name: "lr", number: 0.5 }] }],
  consistency: { max_staleness: 0, aggregate: true },
  bucket_bytes: 64,
  world_size: 1,
};

async function main() {
  const registered = await call(jobs, "RegisterJob", { spec, protocol_version: 2, layout_wanted: true });
  const again = await call(jobs, "RegisterJob", { spec, protocol_version: 2 });
  const viewed = await firstViewOfTheJob();
  await call(jobs, "EndJob", { job });
  const refused = await call(jobs, "EndJob", { job }).catch((error) => grpc.status[error.code]);
  console.log(
    JSON.stringify({
      created: [registered.created, again.created],
      shards: registered.shard_map.shards.length,
      buckets: registered.layout.length,
      viewed: viewed.status.jobs.map((each) => each.name),
      refused,
    }),
  );
}

main().finally(() => [jobs, cluster].forEach((client) => client.close()));
